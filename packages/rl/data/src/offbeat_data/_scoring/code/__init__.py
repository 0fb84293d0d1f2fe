"""The reward `code`: the tests of a row, and programs judged by them."""
