"""Solar Open: Llama's attention, and experts in groups beside a shared one in every layer."""
