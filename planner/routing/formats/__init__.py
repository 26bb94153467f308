"""Expert usage counts and traces in other tools' formats."""
