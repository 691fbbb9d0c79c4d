"""The program that is PID 1 in every sandbox: standard library only, packed into one file."""
