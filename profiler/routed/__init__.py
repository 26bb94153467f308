"""Generated models whose routers answer to the token, and token streams with an asked-for locality."""
