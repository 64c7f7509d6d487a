"""How versions reach other machines."""
