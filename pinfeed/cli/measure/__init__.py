"""What disks and memory do at best, measured."""
