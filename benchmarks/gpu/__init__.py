"""What `gpu_check` proves and times, one file per kind of kernel."""
