"""What `forebay bench` measures with: loads, connections that note when each byte came, and figures made of both."""
