"""Draft heads for another model: EAGLE, EAGLE-2 and EAGLE-3 heads, which have a Llama's layers."""
