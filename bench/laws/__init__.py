"""The laws that every method and task obeys, as plain functions: `bench check` and the tests hold them."""
