"""Changes to a run: what each costs, and which settings do not go together."""
