"""Tests with real server processes: kills, shutdowns, restarts, full disks and hostile clients."""
