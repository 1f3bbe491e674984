"""What is done on the host on which a lab's processes are."""
