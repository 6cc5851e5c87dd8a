"""Gates: what must hold before an answer may be believed, asked of a served engine. Red is a result, not an error."""
