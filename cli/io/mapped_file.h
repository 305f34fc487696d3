/* A file in memory, mapped read-only.
 *
 * Other processes can change a file while it is mapped. A truncated file ends no process: its pages then read as
 * zeros. Call mapped_file_check() after the last access and before the results are used. */
#ifndef STREAMKL_CLI_IO_MAPPED_FILE_H
#define STREAMKL_CLI_IO_MAPPED_FILE_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

typedef struct mapped_file {
    struct mapped_file *next;
    const unsigned char *bytes; /* NULL: no file */
    size_t size;
    int fd;                           /* mapped_file_check() asks it */
    struct stat opened;               /* status of the file when it was opened */
    volatile sig_atomic_t unreadable; /* a page was; now all of them are zeros */
} mapped_file;

/* The file must be a regular one and not empty: otherwise fails by cli_fail(). */
void mapped_file_open(mapped_file *file, const char *path);

/* Fails if the file was truncated or written since it was opened, by its size, modification time and change time, or
 * if a page could not be read. A new name or mode of the file counts as a change; a new or removed link does not, and
 * neither does another file under its name. `path` is for the message. */
void mapped_file_check(const mapped_file *file, const char *path);

void mapped_file_close(mapped_file *file);

/* Fails with "PATH: message", of a long path the end. */
_Noreturn void file_refuse(const char *path, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
