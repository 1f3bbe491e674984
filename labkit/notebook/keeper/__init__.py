"""Labs that outlive the kernel: who has their processes, and how kernels find them."""
