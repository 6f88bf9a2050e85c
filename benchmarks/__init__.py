"""Speed and memory, in one run, beside what they are compared with."""
