/* What most tests include: cmocka, and the calls of cases. */
#ifndef SKL_TESTS_RUNNER_H
#define SKL_TESTS_RUNNER_H

#include "calls.h"
#include "support.h"

#endif
