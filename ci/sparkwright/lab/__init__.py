"""The lab: its runner, its status page, and the upkeep that its workflows do."""
