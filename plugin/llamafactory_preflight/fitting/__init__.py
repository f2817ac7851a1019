"""A run judged again with changes, until one fits or none is faster."""
