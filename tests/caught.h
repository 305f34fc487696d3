/* Failures of the tool, which end its process by cli_fail(): here they end a call. For tests that link with
 * --wrap=cli_fail. */
#ifndef STREAMKL_TESTS_CAUGHT_H
#define STREAMKL_TESTS_CAUGHT_H

#include "cli/common/cli.h"
#include "cli/term/term.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

static struct {
    jmp_buf where;
    char text[2048]; /* "": the call returned */
} caught;

_Noreturn void __wrap_cli_fail(int exit_code, const char *format, ...);
void __wrap_cli_fail(int exit_code, const char *format, ...)
{
    (void)exit_code;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(caught.text, sizeof caught.text, format, arguments);
    va_end(arguments);
    printable_make(caught.text); /* the tool does the same */
    longjmp(caught.where, 1);
}

#define CATCH(call)                                                                                                  \
    do {                                                                                                             \
        caught.text[0] = '\0';                                                                                       \
        if (setjmp(caught.where) == 0)                                                                               \
            call;                                                                                                    \
    } while (0)

#endif
