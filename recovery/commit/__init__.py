"""What a commit is, and where its files lie."""
