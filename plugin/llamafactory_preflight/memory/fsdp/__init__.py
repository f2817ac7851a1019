"""FSDP on paper: decoder layers as units that are gathered around their use."""
