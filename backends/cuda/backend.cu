/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend's entry: devices, contexts, workspaces, and the order of the launches.
 *
 * A call leaves no trace: whatever context the caller had is put back, nothing synchronises, and what it allocates
 * comes from a pool of the backend's own, in the order of the caller's stream. Nothing here links to the driver's
 * library, so that the module loads on a machine without one and can say so. */
#include "common.cuh"

#include <cuda.h>
#include <dlfcn.h>
#include <fenv.h>
#include <limits.h>
#include <pthread.h>

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_cuda {

enum { MOST_EXPERTS = 1024, MOST_SLOTS = 64 };

enum moer_status cuda_failed(moer_message *message, cudaError_t error, const char *what) {
    cudaGetLastError(); /* what is not sticky must not surface in a later call */
    enum moer_status status = MOER_DEVICE;
    if (error == cudaErrorMemoryAllocation)
        status = MOER_NO_MEMORY;
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidPtx ||
        error == cudaErrorUnsupportedPtxVersion)
        status = MOER_UNSUPPORTED;
    return moer_fail(message, status, "%s: %s", what, cudaGetErrorString(error));
}

/* ---- Devices and contexts ---- */

/* cudaGetDeviceCount() blames the driver's version where there is no driver at all. */
const char *unavailable() {
    int driver = 0, count = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0)
        return "there is no NVIDIA driver";
    cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error != cudaSuccess)
        return cudaGetErrorString(error);
    return count > 0 ? nullptr : "there is no CUDA device";
}

CUresult get_context(CUcontext *context) {
    static const auto function = driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
    return function ? function(context) : CUDA_ERROR_NOT_FOUND;
}

CUresult set_context(CUcontext context) {
    static const auto function = driver_function<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent");
    return function ? function(context) : CUDA_ERROR_NOT_FOUND;
}

enum moer_status check_device(int device, moer_message *message) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess)
        return cuda_failed(message, error, "cudaGetDeviceCount");
    if (device < 0 || device >= count || device >= MOST_DEVICES)
        return moer_fail(message, MOER_UNAVAILABLE, "there is no device cuda:%d, only %d", device, count);
    return MOER_OK;
}

/* A device is current from here to the end of the scope; then what was current before, if anything, is again. */
class current_device {
  public:
    current_device(int device, moer_message *message) {
        get_context(&before);
        status = check_device(device, message);
        const cudaError_t error = status ? cudaSuccess : cudaSetDevice(device);
        if (error != cudaSuccess)
            status = cuda_failed(message, error, "cudaSetDevice");
    }
    ~current_device() {
        set_context(before);
    }
    enum moer_status status = MOER_OK;

  private:
    CUcontext before = nullptr;
};

/* ---- A call's problem ---- */

typed_rows rows_of(const DLTensor *tensor) {
    if (!tensor)
        return typed_rows{};
    /* A tensor without elements, or a query, may have no data; presence must still show. */
    alignas(CHUNK_BYTES) static char nothing;
    char *data = static_cast<char *>(moer_data(tensor));
    /* A single row may come with any stride. */
    int64_t stride = tensor->shape[0] > 1 ? moer_stride(tensor, 0) : tensor->shape[1];
    typed_rows result{};
    result.data = data ? data : &nothing;
    result.stride = stride;
    result.type = tensor->dtype.bits == 32 ? F32 : tensor->dtype.code == kDLBfloat ? BF16 : F16;
    return result;
}

input input_of(const DLTensor *tensor) {
    const rows rows = rows_of(tensor);
    return input{rows.data, rows.data ? rows.stride * moer_element_size(tensor) : 0};
}

template <typename Args>
problem common_problem(const Args &args, const DLTensor *weight, const DLTensor *grad_weight, const DLTensor *ids,
                       const DLTensor *incoming) {
    problem result{};
    result.tokens = args.hidden_states->shape[0];
    result.hidden = args.hidden_states->shape[1];
    result.experts = static_cast<int>(weight->shape[0]);
    result.top_k = static_cast<int>(ids->shape[1]);
    result.hidden_states = rows_of(args.hidden_states);
    result.weight = rows_of(weight);
    result.type = rows_of(weight).type;
    result.grad_hidden = rows_of(args.grad_hidden_states);
    result.grad_weight = rows_of(grad_weight);
    result.grad_logits = rows_of(args.grad_logits);
    result.accumulate = args.accumulate;
    result.ids = input_of(ids);
    result.wide_ids = ids->dtype.bits == 64;
    result.invalid_ids = static_cast<int *>(moer_data(args.invalid_ids));
    result.incoming = input_of(incoming);
    return result;
}

problem make_problem(const moer_softmax_topk_backward_args &args) {
    problem result =
        common_problem(args, args.gate_weight, args.grad_gate_weight, args.selected_experts, args.grad_routing_weights);
    result.operation = MOER_SOFTMAX_TOPK_BACKWARD;
    result.probs = input_of(args.routing_probs);
    result.sum = input_of(args.routing_weights_sum);
    result.direct = input_of(args.grad_router_logits);
    if (args.grad_expert_mask) {
        const int64_t size = moer_element_size(args.grad_expert_mask);
        result.mask = input_of(args.grad_expert_mask).data;
        result.mask_expert = moer_stride(args.grad_expert_mask, 0) * size;
        result.mask_slot = moer_stride(args.grad_expert_mask, 1) * size;
        result.mask_token = moer_stride(args.grad_expert_mask, 2) * size;
    }
    return result;
}

/* f as float32, in plain arithmetic, whatever the caller's is. */
float plain_factor(double given) {
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    const volatile double factor = given;
    const volatile float result = factor == 0 ? 1.0f : static_cast<float>(factor);
    fesetenv(&before);
    return result;
}

problem make_problem(const moer_sigmoid_topk_backward_args &args) {
    problem result = common_problem(args, args.weight, args.grad_weight, args.topk_indices, args.grad_topk_weights);
    result.operation = MOER_SIGMOID_TOPK_BACKWARD;
    result.scaling = plain_factor(args.routed_scaling_factor);
    result.scores = input_of(args.scores);
    result.normalized = input_of(args.topk_weights_normalized);
    result.denominator = input_of(args.denominator);
    return result;
}

/* The fields that every args struct begins with, and the first of its tensors. */
struct common_args {
    MOER_COMMON_FIELDS;
};

int64_t round_up(int64_t value, int64_t multiple) {
    return divide_up(value, multiple) * multiple;
}

/* Parts of a workspace, one after the other, as offsets until there is one. */
class parts {
  public:
    template <typename V>
    void add(V **part, int64_t bytes) {
        *part = reinterpret_cast<V *>(size);
        size += round_up(bytes, 256);
    }
    int64_t size = 0;
};

/* Whether columns.cu's kernel is made for such a shape: for so many tokens it is faster than the fused one. */
bool has_columns_shape(const problem &problem) {
    enum { FEWEST = 8192, MOST_EXPERTS = 128, MOST = 1 << 30 };
    return problem.kernels == HOPPER && problem.type != F32 && problem.tokens >= FEWEST && problem.tokens <= MOST &&
           problem.experts > 0 && problem.experts <= MOST_EXPERTS && problem.hidden > 0 && problem.hidden <= MOST &&
           problem.hidden % 8 == 0 && columns_keep_busy(problem);
}

/* Whether G goes to the fused kernel as entries: where a token has few, or its tiles have not so many experts. */
bool sends_entries(const problem &problem) {
    enum { FEW_SLOTS = 8 };
    return problem.operation == MOER_SIGMOID_TOPK_BACKWARD &&
           (problem.top_k <= FEW_SLOTS || problem.experts > FUSED_EXPERTS);
}

/* Whether the fused kernel is made for such a shape. On Hopper more columns would leave too few multiprocessors to the
 * hidden gradient. */
bool has_fused_shape(const problem &problem) {
    enum { MOST_SLOTS_SPARSE = 16, MOST_SLICES = 100, MOST_TOKENS = 1 << 30 };
    const bool entries = sends_entries(problem), hopper = problem.kernels == HOPPER;
    return problem.kernels != GENERIC && !has_columns_shape(problem) && problem.type != F32 && problem.tokens > 0 &&
           problem.tokens <= MOST_TOKENS && problem.experts > 0 &&
           problem.experts <= (entries ? FUSED_EXPERTS_SPARSE : FUSED_EXPERTS) &&
           (!entries || problem.top_k <= MOST_SLOTS_SPARSE) && problem.hidden > 0 && problem.hidden % 8 == 0 &&
           (!hopper || divide_up(problem.hidden, FUSED_COLUMNS) <= MOST_SLICES);
}

/* Whether wide.cu's kernel is made for such a shape: where the others are not, tiles of 128 experts are not mostly
 * empty, and the gate fits its registers. */
bool has_wide_shape(const problem &problem) {
    enum { FEWEST_EXPERTS = 65, MOST_EXPERTS = 512, MOST = 1 << 30 };
    return problem.kernels == HOPPER && problem.type != F32 && !has_fused_shape(problem) &&
           !has_columns_shape(problem) && problem.tokens > 0 && problem.tokens <= MOST &&
           problem.experts >= FEWEST_EXPERTS && problem.experts <= MOST_EXPERTS && problem.hidden > 0 &&
           problem.hidden <= MOST && problem.hidden % 8 == 0;
}

/* Whether a matrix of 16-bit elements can be copied by tensor maps. */
bool is_mapped(const rows &matrix, int64_t columns) {
    return is_aligned(matrix, 2) && matrix.stride >= columns && matrix.stride < INT64_C(1) << 39;
}

/* Whether one kernel can make both products, which such a kernel is then made for. */
bool fits_one_kernel(const problem &problem) {
    return problem.grad_hidden.data && problem.grad_weight.data && problem.grad_hidden.type == problem.type &&
           is_mapped(problem.hidden_states, problem.hidden) && is_mapped(problem.weight, problem.hidden) &&
           is_mapped(problem.grad_hidden, problem.hidden);
}

bool fuses(const problem &problem) {
    return has_fused_shape(problem) && fits_one_kernel(problem);
}

/* Tokens of a split of the weight gradient, by shapes, by which kernels the device has and by how the gradient is
 * rounded, but not by where the tensors lie: few splits, since each costs a write and a read of the whole gradient, but
 * as many as give most multiprocessors a tile. The fused kernel's chains are splits too. */
int64_t choose_split(const problem &problem, int64_t tiles) {
    enum { FEWEST = 320, ENOUGH_TILES = 96, STEP = TILE_TOKENS };
    const int64_t tokens = problem.tokens;
    if (tokens == 0 || tiles == 0)
        return STEP;
    if (has_fused_shape(problem))
        return LONGEST_CHAIN;
    if (has_columns_shape(problem))
        return choose_columns_split(problem);
    if (has_wide_shape(problem))
        return choose_wide_split(problem);
    int64_t splits = ENOUGH_TILES / (tiles < ENOUGH_TILES ? tiles : ENOUGH_TILES);
    if (splits > divide_up(tokens, FEWEST))
        splits = divide_up(tokens, FEWEST);
    if (splits < divide_up(tokens, LONGEST_CHAIN))
        splits = divide_up(tokens, LONGEST_CHAIN);
    return round_up(divide_up(tokens, splits), STEP);
}

/* Lays out the workspace, and says how large it is. */
size_t lay_out(problem *problem, bool fused) {
    parts parts;
    problem->fused = fused;
    problem->by_columns = !fused && has_columns_shape(*problem) && fits_one_kernel(*problem);
    problem->wide = !fused && !problem->by_columns && has_wide_shape(*problem) && fits_one_kernel(*problem);
    problem->entries = 0;
    if (fused && sends_entries(*problem))
        problem->entries = round_up(problem->top_k > 0 ? problem->top_k : 1, 4);
    problem->logits_stride =
        static_cast<int>(round_up(problem->experts, fused ? FUSED_LOGITS_MULTIPLE : LOGITS_MULTIPLE));
    problem->weight_rows = choose_weight_rows(problem->experts, problem->type);
    problem->partial_rows = round_up(problem->experts, problem->weight_rows);
    problem->partial_stride = round_up(problem->hidden, TILE_COLUMNS);
    problem->split_tokens =
        choose_split(*problem, problem->partial_rows / problem->weight_rows * problem->partial_stride / TILE_COLUMNS);
    problem->splits = divide_up(problem->tokens, problem->split_tokens);
    const int64_t row =
        problem->entries ? problem->entries * 4 : problem->logits_stride * (problem->type == F32 ? 4 : 2);
    parts.add(&problem->logits, (fused ? round_up(problem->tokens, PADDED_TOKENS) : problem->tokens) * row);
    parts.add(&problem->partials, !fused && problem->grad_weight.data
                                      ? problem->splits * problem->partial_rows * problem->partial_stride * 4
                                      : 0);
    const int64_t arrivals = !fused && has_wide_shape(*problem) ? count_wide_arrivals(*problem) : 0;
    problem->arrival_count = problem->wide ? static_cast<int>(arrivals) : 0;
    parts.add(&problem->arrivals, arrivals * 4);
    return static_cast<size_t>(parts.size);
}

/* Makes an address of an offset into the workspace. */
template <typename V>
void place(V **part, void *workspace) {
    *part = reinterpret_cast<V *>(static_cast<char *>(workspace) + reinterpret_cast<uintptr_t>(*part));
}

/* The problem of a call, but for its layout. */
enum moer_status plan(enum moer_operation operation, const void *args, problem *result, int *device,
                      moer_message *message) {
    const DLTensor *hidden, *weight, *ids;
    if (operation == MOER_SOFTMAX_TOPK_BACKWARD) {
        auto softmax = static_cast<const moer_softmax_topk_backward_args *>(args);
        hidden = softmax->hidden_states, weight = softmax->gate_weight, ids = softmax->selected_experts;
    } else if (operation == MOER_SIGMOID_TOPK_BACKWARD) {
        auto sigmoid = static_cast<const moer_sigmoid_topk_backward_args *>(args);
        hidden = sigmoid->hidden_states, weight = sigmoid->weight, ids = sigmoid->topk_indices;
    } else {
        return moer_fail(message, MOER_UNSUPPORTED, "the cuda backend does not have this operation");
    }
    int64_t tokens = hidden->shape[0], width = hidden->shape[1], experts = weight->shape[0], top_k = ids->shape[1];
    if (experts > MOST_EXPERTS || top_k > MOST_SLOTS || top_k > experts)
        return moer_fail(message, MOER_UNSUPPORTED,
                         "%lld experts, %lld of them chosen: the cuda backend takes at most %d, and %d of those",
                         static_cast<long long>(experts), static_cast<long long>(top_k), MOST_EXPERTS, MOST_SLOTS);
    /* A launch has fewer than 2^31 blocks, of 4 tokens or of tiles of 128 x 128. */
    if (tokens > INT64_C(1) << 32 || width > INT64_C(1) << 31 ||
        round_up(tokens, 128) / 128 * (round_up(width, 128) / 128) > INT64_C(1) << 30)
        return moer_fail(message, MOER_UNSUPPORTED, "hidden_states of [%lld, %lld] take more blocks than a launch has",
                         static_cast<long long>(tokens), static_cast<long long>(width));
    *result = operation == MOER_SOFTMAX_TOPK_BACKWARD
                  ? make_problem(*static_cast<const moer_softmax_topk_backward_args *>(args))
                  : make_problem(*static_cast<const moer_sigmoid_topk_backward_args *>(args));
    *device = hidden->device.device_id;
    return MOER_OK;
}

/* ---- A device's fast path ---- */

void uuid_text(const cudaUUID_t &uuid, char text[64]) {
    int length = snprintf(text, 64, "GPU");
    for (int i = 0; i < 16; i++)
        length +=
            snprintf(text + length, 64 - length, "%s%02x", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                     static_cast<unsigned char>(uuid.bytes[i]));
}

/* CUDA's version, and the name of the driver's own library, which has the rest of it: libcuda.so.580.159.04. */
void driver_text(char text[64]) {
    int version = 0;
    Dl_info info;
    char path[PATH_MAX];
    cudaDriverGetVersion(&version);
    const auto function = driver_function<void *>("cuDriverGetVersion");
    const bool found = function && dladdr(function, &info) && info.dli_fname && realpath(info.dli_fname, path);
    const char *slash = found ? strrchr(path, '/') : nullptr;
    snprintf(text, 64, "%d.%d %.40s", version / 1000, version % 1000 / 10, slash ? slash + 1 : "unknown");
}

enum moer_status fast_path_of(int device, moer_fast_path *path, moer_message *message) {
    cudaDeviceProp properties;
    const enum moer_status status = check_device(device, message);
    if (status)
        return status;
    *path = {};
    path->name = path_of(device)->name;
    path->evidence = path_of(device)->evidence;
    path->build = moer_cuda_build;
    const cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error != cudaSuccess)
        return cuda_failed(message, error, "cudaGetDeviceProperties");
    uuid_text(properties.uuid, path->device);
    driver_text(path->driver);
    return MOER_OK;
}

/* ---- Workspaces ---- */

/* A pool for each device, made on first need. It keeps what it has, up to as much as a large batch takes. */
cudaError_t pool_of(int device, cudaMemPool_t *pool) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static cudaMemPool_t pools[MOST_DEVICES];
    uint64_t keep = UINT64_C(256) << 20;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&mutex);
    if (!pools[device]) {
        cudaMemPoolProps properties{};
        properties.allocType = cudaMemAllocationTypePinned;
        properties.location.type = cudaMemLocationTypeDevice;
        properties.location.id = device;
        error = cudaMemPoolCreate(&pools[device], &properties);
        if (error == cudaSuccess)
            error = cudaMemPoolSetAttribute(pools[device], cudaMemPoolAttrReleaseThreshold, &keep);
    }
    *pool = pools[device];
    pthread_mutex_unlock(&mutex);
    return error;
}

enum moer_status take_workspace(int device, cudaStream_t stream, size_t bytes, void **workspace,
                                moer_message *message) {
    cudaStreamCaptureStatus capturing;
    cudaError_t error = cudaStreamIsCapturing(stream, &capturing);
    if (error == cudaSuccess && capturing != cudaStreamCaptureStatusNone)
        return moer_fail(message, MOER_INVALID,
                         "workspace is NULL while the stream is capturing; give one of %zu bytes, as the operation's "
                         "_workspace_size() says",
                         bytes);
    cudaMemPool_t pool;
    if (error == cudaSuccess)
        error = pool_of(device, &pool);
    if (error == cudaSuccess)
        error = cudaMallocFromPoolAsync(workspace, bytes, pool, stream);
    return error == cudaSuccess ? MOER_OK : cuda_failed(message, error, "the workspace");
}

/* ---- The backend's functions ---- */

enum moer_status launch_all(const problem &problem, cudaStream_t stream, moer_message *message) {
    cudaError_t error = cudaSuccess;
    if (problem.tokens > 0)
        error = problem.entries ? launch_entries(problem, stream) : launch_logits(problem, stream);
    if (error == cudaSuccess)
        error = problem.fused        ? launch_fused(problem, stream)
                : problem.by_columns ? launch_columns(problem, stream)
                : problem.wide       ? launch_wide(problem, stream)
                                     : launch_products(problem, stream);
    return error == cudaSuccess ? MOER_OK : cuda_failed(message, error, "a kernel could not be launched");
}

enum moer_status run(enum moer_operation operation, const void *args, moer_message *message) {
    problem problem{};
    size_t bytes = 0;
    int device = 0;
    enum moer_status status = plan(operation, args, &problem, &device, message);
    if (status)
        return status;
    current_device current(device, message);
    if (current.status)
        return current.status;
    choice choice;
    status = choose_path(operation, device, &choice, message);
    if (status)
        return status;
    problem.kernels = choice.kernels;
    bytes = lay_out(&problem, fuses(problem));
    auto common = static_cast<const common_args *>(args);
    auto stream = static_cast<cudaStream_t>(common->stream);
    void *workspace = common->workspace;
    if (!workspace && bytes > 0)
        status = take_workspace(device, stream, bytes, &workspace, message);
    if (status)
        return status;
    place(&problem.logits, workspace);
    place(&problem.partials, workspace);
    place(&problem.arrivals, workspace);
    status = launch_all(problem, stream, message);
    if (!common->workspace && workspace) {
        cudaError_t error = cudaFreeAsync(workspace, stream);
        if (error != cudaSuccess && !status)
            status = cuda_failed(message, error, "the workspace");
    }
    return status;
}

enum moer_status workspace_size(enum moer_operation operation, const void *args, size_t *bytes, moer_message *message) {
    problem problem{};
    int device = 0;
    const enum moer_status status = plan(operation, args, &problem, &device, message);
    if (status)
        return status;
    /* Enough for whichever kernels the call will take, whether or not it accumulates. */
    *bytes = 0;
    for (enum kernels kernels : {GENERIC, HOPPER, BLACKWELL})
        for (bool fused : {false, true})
            for (bool accumulate : {false, true}) {
                problem.kernels = kernels;
                problem.accumulate = accumulate;
                const size_t size = !fused || has_fused_shape(problem) ? lay_out(&problem, fused) : 0;
                *bytes = *bytes > size ? *bytes : size;
            }
    return MOER_OK;
}

/* What keeps a call from the fast path that it may take; "" where nothing does. On Hopper that is its dtype alone,
 * since the products' own kernels multiply by wgmma, too, what no kernel makes at once. */
const char *misfit(const problem &problem) {
    if (problem.kernels == GENERIC || problem.fused || (problem.kernels == HOPPER && problem.type != F32))
        return "";
    if (problem.type == F32)
        return "float32";
    if (problem.hidden % 8 != 0)
        return "H is no multiple of 8";
    if (problem.tokens == 0 || problem.hidden == 0 || problem.experts == 0)
        return "nothing to multiply";
    if (!has_fused_shape(problem))
        return "E or K is too large";
    if (!problem.grad_hidden.data || !problem.grad_weight.data)
        return "a gradient is absent";
    return problem.grad_hidden.type != problem.type ? "grad_hidden_states has another dtype"
                                                    : "rows do not begin at multiples of 16 bytes, or overlap";
}

enum moer_status explain(enum moer_operation operation, const void *args, moer_message *message) {
    problem problem{};
    choice choice;
    int device = 0;
    enum moer_status status = plan(operation, args, &problem, &device, message);
    if (status)
        return status;
    status = choose_path(operation, device, &choice, message);
    if (status)
        return status;
    problem.kernels = choice.kernels;
    lay_out(&problem, fuses(problem));
    const bool tuned = problem.type != F32 && (problem.kernels == HOPPER || problem.fused);
    char unfit[96] = "", why[sizeof choice.permit->reason + 64] = "";
    if (*misfit(problem))
        snprintf(unfit, sizeof unfit, "; not for %s: %s", choice.path->name, misfit(problem));
    if (choice.forced)
        snprintf(why, sizeof why, "; by MOER_CUDA_ARCH");
    else if (choice.path->name && choice.permit && problem.type != F32)
        snprintf(why, sizeof why, "; %s: %s", choice.path->name, choice.permit->reason);
    return moer_fail(message, MOER_OK,
                     "cuda:%d, %s path: %s products%s, weight gradient in %lld splits of %lld tokens%s%s", device,
                     tuned ? choice.path->name : "generic",
                     problem.type == F32        ? "float32"
                     : !tuned                   ? "mma.sync"
                     : choice.kernels == HOPPER ? "wgmma"
                                                : "tcgen05",
                     problem.fused || problem.wide || problem.by_columns ? " by one kernel" : "",
                     static_cast<long long>(problem.splits), static_cast<long long>(problem.split_tokens), unfit, why);
}

/* What MOER_CUDA_ARCH makes of a device's calls, where it is set; the length of the line. */
int print_override(int device, char *text, size_t size) {
    choice choice;
    moer_message message;
    const bool refused = choose_path(MOER_SOFTMAX_TOPK_BACKWARD, device, &choice, &message);
    if (!choice.forced)
        return 0;
    if (refused)
        return snprintf(text, size, "cuda:%d by MOER_CUDA_ARCH: calls are refused: %s\n", device, message.text);
    return snprintf(text, size, "cuda:%d by MOER_CUDA_ARCH: %s path, whatever is proven or found\n", device,
                    choice.kernels == GENERIC ? "generic" : choice.path->name);
}

void info(char *text, size_t size) {
    int count = 0, driver = 0, runtime = 0;
    cudaGetDeviceCount(&count);
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    int length = snprintf(text, size, "build: %s\ndriver: CUDA %d.%d\nruntime: CUDA %d.%d\n", moer_cuda_build,
                          driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    for (int device = 0; device < count && static_cast<size_t>(length) < size; device++) {
        cudaDeviceProp properties;
        if (cudaGetDeviceProperties(&properties, device) != cudaSuccess)
            continue;
        char uuid[64];
        uuid_text(properties.uuid, uuid);
        length += snprintf(text + length, size - length, "cuda:%d: %s, sm_%d%d, %d multiprocessors, %.0f GiB, %s\n",
                           device, properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                           static_cast<double>(properties.totalGlobalMem) / (1 << 30), uuid);
        if (static_cast<size_t>(length) < size)
            length += print_override(device, text + length, size - length);
    }
    cudaGetLastError();
}

enum moer_status allocate(DLDevice device, size_t bytes, void **data, moer_message *message) {
    current_device current(device.device_id, message);
    if (current.status)
        return current.status;
    cudaError_t error = device.device_type == kDLCUDAManaged ? cudaMallocManaged(data, bytes) : cudaMalloc(data, bytes);
    return error == cudaSuccess ? MOER_OK : cuda_failed(message, error, "an allocation");
}

void release(DLDevice device, void *data) {
    moer_message message;
    current_device current(device.device_id, &message);
    if (!current.status)
        cudaFree(data);
}

enum moer_status copy(void *to, DLDevice to_device, const void *from, DLDevice from_device, size_t bytes,
                      moer_message *message) {
    bool from_host = from_device.device_type == kDLCPU || from_device.device_type == kDLCUDAHost;
    current_device current(from_host ? to_device.device_id : from_device.device_id, message);
    if (current.status)
        return current.status;
    cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
    if (error == cudaSuccess) /* no more than the copy, so that other streams may capture */
        error = cudaStreamSynchronize(cudaStreamLegacy);
    return error == cudaSuccess ? MOER_OK : cuda_failed(message, error, "a copy");
}

const moer_backend backend = {
    .abi = MOER_BACKEND_ABI,
    .name = "cuda",
    .unavailable = unavailable,
    .info = info,
    .run = run,
    .workspace_size = workspace_size,
    .explain = explain,
    .allocate = allocate,
    .release = release,
    .copy = copy,
    .fast_path = fast_path_of,
    .permit = permit_path,
};

} // namespace moer_cuda

extern "C" const struct moer_backend *moer_backend_entry(void) {
    return &moer_cuda::backend;
}
