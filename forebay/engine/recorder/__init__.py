"""The flight recorder: a buffer of the scheduler's inputs, the file that is made of it, and its replay."""
