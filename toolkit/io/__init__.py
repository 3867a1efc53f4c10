"""Files: whole or not there, locked while they are written, read within their bounds."""
