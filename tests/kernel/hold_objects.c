/*
 * hold_objects DEVICE NUMBER [BYTES]: makes NUMBER queue pairs, a completion queue and a memory
 * region of BYTES (4096 by default) on an RDMA device, prints "ready", and keeps them until a signal
 * ends it.
 */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void require(const void *made, const char *what)
{
    if (made == NULL) {
        perror(what);
        exit(1);
    }
}

int main(int count, char **words)
{
    struct ibv_device **devices = ibv_get_device_list(NULL), *device = NULL;

    if (count != 3 && count != 4)
        return 2;
    size_t bytes = count == 4 ? (size_t)atol(words[3]) : 4096;
    void *memory = malloc(bytes);
    require(memory, "malloc");
    for (int i = 0; devices != NULL && devices[i] != NULL; i++)
        if (strcmp(ibv_get_device_name(devices[i]), words[1]) == 0)
            device = devices[i];
    require(device, words[1]);
    struct ibv_context *context = ibv_open_device(device);
    require(context, "ibv_open_device");
    struct ibv_pd *pd = ibv_alloc_pd(context);
    require(pd, "ibv_alloc_pd");
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    require(cq, "ibv_create_cq");
    require(ibv_reg_mr(pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE), "ibv_reg_mr");
    for (int i = 0; i < atoi(words[2]); i++) {
        struct ibv_qp_init_attr wanted = {
            .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {1, 1, 1, 1, 0}};
        require(ibv_create_qp(pd, &wanted), "ibv_create_qp");
    }
    puts("ready");
    fflush(stdout);
    pause();
    return 0;
}
