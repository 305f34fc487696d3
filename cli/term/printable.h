/* Text from files and arguments that is shown on a terminal. */
#ifndef STREAMKL_CLI_TERM_PRINTABLE_H
#define STREAMKL_CLI_TERM_PRINTABLE_H

/* Replaces the bytes of every character by '?' that could drive the terminal, break the line or change the order in
 * which its text is shown: control characters (C0, DEL, C1), line separators and bidirectional controls. */
void printable_make(char *text);

typedef struct printable {
    char text[4096];
} printable;

/* A copy, cut to fit. */
printable printable_of(const char *text);

#endif
