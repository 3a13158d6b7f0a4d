"""Many workers whose time goes by in closed form between two changes."""
