"""Follows the pages for users, word for word: what they tell to type is typed, and what they say that it prints is compared."""
