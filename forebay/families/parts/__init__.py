"""Parts that several families share: configurations and the code that reads them."""
