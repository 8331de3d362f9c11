"""Names in the files of llama.cpp that several families share."""
