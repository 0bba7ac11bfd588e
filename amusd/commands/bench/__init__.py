"""`amusd bench`: what one pass, one draft step and one message cost on this machine, beside their floors."""
