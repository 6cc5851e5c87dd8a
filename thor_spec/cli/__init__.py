"""The command line. The only room that prints, reads arguments or exits."""
