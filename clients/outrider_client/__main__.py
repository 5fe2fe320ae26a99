"""python -m outrider_client: the `outrider` command, for where the script is not on the PATH."""

from outrider_client.cli import main

if __name__ == "__main__":
    main()
