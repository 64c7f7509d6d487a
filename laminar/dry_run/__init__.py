"""What a config would need and where its roles would go, without starting anything."""
