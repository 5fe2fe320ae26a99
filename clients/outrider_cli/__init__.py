"""The `outrider` command: start services, generate, chat, look, measure."""
