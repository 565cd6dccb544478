"""What is asked, and how what comes back is judged: exercises and checks as data, kinds, banks of mistakes."""
