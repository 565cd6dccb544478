"""Where answers run: processes behind walls, what ranks are asked to do there, and what comes back from them."""
