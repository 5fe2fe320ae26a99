"""The APIs in which texts are asked for, a file each: its parameters, what they ask for, and its answers."""
