"""ERNIE 4.5, dense: Llama whose heads are rotated in neighbouring pairs; biases everywhere or nowhere."""
