"""Configuration: strings and mappings to objects, and back."""
