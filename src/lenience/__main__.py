from lenience.cli import main

if __name__ == "__main__":
    main()
