"""SGLang's route: /generate."""
