"""Load: what is asked, when, and the shell that sends it and writes down what came back."""
