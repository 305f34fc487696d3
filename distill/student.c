#include "distill/student.h"

skl_status student_allocate(student_model *student, const layer *initial_weights)
{
    *student = (student_model){.step = 0};
    layer *const layers[] = {&student->weights, &student->gradient, &student->first_moment, &student->second_moment};
    skl_status status = SKL_OK;
    for (size_t l = 0; l < sizeof layers / sizeof layers[0] && status == SKL_OK; l++)
        status = layer_allocate(layers[l], initial_weights->shape);
    if (status == SKL_OK)
        layer_copy(&student->weights, initial_weights);
    return status;
}

void student_free(student_model *student)
{
    layer_free(&student->weights);
    layer_free(&student->gradient);
    layer_free(&student->first_moment);
    layer_free(&student->second_moment);
}
