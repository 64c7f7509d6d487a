"""Pure decisions, shared by the real system and the simulator."""
