"""The tests, a package so that started ranks find the functions they are given."""
