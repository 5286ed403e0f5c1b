/* Memory of tensors in which no access out of bounds stays unseen; for LD_PRELOAD.

   Each block of posix_memalign, which is what torch takes for tensors, lies by itself between pages that nobody may
   touch, either at their upper or at their lower end. A byte read or written beyond that end is a SIGSEGV. What is left
   on the other side is filled, and looked at when the block is freed: a write there is a SIGABRT. New memory is filled
   with numbers that are no index of anything, freed memory is gone, and a block that is too large is refused. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, FILL = 0xAB, NEW = 0x5B };
static const size_t RANGE = 1ull << 45, GUARD = 1ull << 20, MOST = 1ull << 29, FILLED = 1ull << 20;

typedef struct {
    char *begin;    /* of the pages that may be touched; the lower guard page before them holds nothing */
    size_t pages, size;
    char *block;
} Place;

static char *range;
static size_t used = 1 << 20;
static unsigned turn;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*next_free)(void *);
static void *(*next_realloc)(void *, size_t);
static size_t (*next_usable)(void *);

/* Places are found by the megabyte in which a block begins; the table is as sparse as the memory that is used. */
static Place *table;

__attribute__((constructor)) static void begin(void) {
    next_free = dlsym(RTLD_NEXT, "free");
    next_realloc = dlsym(RTLD_NEXT, "realloc");
    next_usable = dlsym(RTLD_NEXT, "malloc_usable_size");
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *found = mmap(NULL, RANGE, PROT_NONE, flags, -1, 0);
    table = mmap(NULL, (RANGE / GUARD) * sizeof(Place), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (found == MAP_FAILED || table == MAP_FAILED) abort();
    range = found;
}

static int is_ours(void *block) {
    return range && (char *)block >= range && (char *)block < range + RANGE;
}

int posix_memalign(void **result, size_t alignment, size_t size) {
    (void)alignment; /* torch asks for 64; its kernels read and write vectors that are not aligned */
    if (size > MOST) return ENOMEM;
    size_t bytes = size ? size : 1, pages = (bytes + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_lock(&lock);
    size_t at = used, taken = (pages + 2 * GUARD - 1) / GUARD * GUARD;
    if (!range || used + taken + GUARD > RANGE) {
        pthread_mutex_unlock(&lock);
        *result = malloc(size);
        return *result ? 0 : ENOMEM;
    }
    used += taken;
    int at_end = ++turn & 1;
    pthread_mutex_unlock(&lock);
    char *begin = range + at;
    if (mprotect(begin, pages, PROT_READ | PROT_WRITE)) return ENOMEM;
    char *block = begin + (at_end ? (pages - bytes) & ~(size_t)15 : 0);
    if (pages <= FILLED) {
        memset(begin, FILL, pages);
        memset(block, NEW, size);
    }
    table[at / GUARD] = (Place){begin, pages, size, block};
    *result = block;
    return 0;
}

void free(void *block) {
    if (!is_ours(block)) {
        if (next_free) next_free(block);
        return;
    }
    Place *place = &table[((char *)block - range) / GUARD];
    if (place->block != block) abort();
    if (place->pages <= FILLED)
        for (char *byte = place->begin; byte < place->begin + place->pages; byte++)
            if ((byte < place->block || byte >= place->block + place->size) && *byte != (char)FILL) abort();
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(place->begin, place->pages, PROT_NONE, flags, -1, 0) == MAP_FAILED) abort();
    place->block = NULL;
}

void *realloc(void *block, size_t size) {
    if (!is_ours(block)) return next_realloc(block, size);
    Place *place = &table[((char *)block - range) / GUARD];
    void *made = malloc(size);
    if (made) memcpy(made, block, size < place->size ? size : place->size), free(block);
    return made;
}

size_t malloc_usable_size(void *block) {
    return is_ours(block) ? table[((char *)block - range) / GUARD].size : next_usable(block);
}
