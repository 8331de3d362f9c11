"""The parts of `forebay bench`: loads, connections that note when each byte came, and figures made of both."""
