"""Child processes: how engines are asked, programs started and work shared out, each in one place."""
