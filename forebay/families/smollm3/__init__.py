"""SmolLM 3: some layers (every fourth by default) do without rotary embedding."""
