"""K-EXAONE: EXAONE 4's attention between norms before the parts, and DeepSeek-V3's experts behind the first layer."""
