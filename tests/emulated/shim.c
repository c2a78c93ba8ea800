// A PJRT plugin for tests: torch_tpu loads it in place of libtpu, and it forwards to a PJRT plugin for the CPU.
//
// What it adds is what torch_tpu asks of a TPU and a CPU plugin does not have: the topology extension of a single chip,
// memory kinds of outputs, and a hook through which Python rewrites each program before it is compiled. It also writes a
// record of what moves between host and device and of large results. Everything that is not understood aborts with a
// message, so that no test passes on an invented answer.
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pjrt_c_api.h"

#define EXPORT __attribute__((visibility("default")))

// Returns a buffer that stays alive until the next call and writes its size; NULL makes the compilation fail.
typedef char* (*Rewriter)(const char* code, size_t size, size_t* new_size);

static const PJRT_Api* plugin;
static Rewriter rewriter;
static int64_t claimed_stablehlo[3];
static int64_t plugin_stablehlo[3];

static void read_plugin_stablehlo(void) {
  PJRT_Plugin_Attributes_Args args = {.struct_size = sizeof args};
  if (plugin->PJRT_Plugin_Attributes(&args)) return;
  for (size_t i = 0; i < args.num_attributes; i++) {
    const PJRT_NamedValue* value = &args.attributes[i];
    if (value->name_size == strlen("stablehlo_current_version") &&
        !memcmp(value->name, "stablehlo_current_version", value->name_size))
      memcpy(plugin_stablehlo, value->int64_array_value, sizeof plugin_stablehlo);
  }
}

// Call before torch_tpu asks for the API. Returns 0, or 1 with a message on stderr.
EXPORT int emulator_configure(const char* plugin_path, Rewriter hook, const int64_t* claimed, int64_t* real) {
  void* library = dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "emulator: %s\n", dlerror());
    return 1;
  }
  const PJRT_Api* (*get)(void) = (const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi");
  if (!get) {
    fprintf(stderr, "emulator: %s has no GetPjrtApi\n", plugin_path);
    return 1;
  }
  plugin = get();
  rewriter = hook;
  memcpy(claimed_stablehlo, claimed, sizeof claimed_stablehlo);
  read_plugin_stablehlo();
  memcpy(real, plugin_stablehlo, sizeof plugin_stablehlo);
  return 0;
}

// Options that only libtpu knows are left out; the CPU plugin is told to show one device.
static PJRT_Error* client_create(PJRT_Client_Create_Args* args) {
  const PJRT_NamedValue* given = args->create_options;
  size_t num_given = args->num_options, count = 0;
  PJRT_NamedValue* options = calloc(num_given + 1, sizeof *options);
  for (size_t i = 0; i < num_given; i++)
    if (given[i].name_size != strlen("premapped_buffer_size") ||
        memcmp(given[i].name, "premapped_buffer_size", given[i].name_size))
      options[count++] = given[i];
  options[count++] = (PJRT_NamedValue){.struct_size = sizeof *options,
                                       .name = "cpu_device_count",
                                       .name_size = strlen("cpu_device_count"),
                                       .type = PJRT_NamedValue_kInt64,
                                       .int64_value = 1,
                                       .value_size = 1};
  args->create_options = options;
  args->num_options = count;
  PJRT_Error* error = plugin->PJRT_Client_Create(args);
  args->create_options = given;
  args->num_options = num_given;
  free(options);
  return error;
}

// The CPU plugin does not implement this. Lives as long as the executable, that is, as long as the test process.
static PJRT_Error* output_memory_kinds(PJRT_Executable_OutputMemoryKinds_Args* args) {
  PJRT_Executable_NumOutputs_Args outputs = {.struct_size = sizeof outputs, .executable = args->executable};
  PJRT_Error* error = plugin->PJRT_Executable_NumOutputs(&outputs);
  if (error) return error;
  const char** kinds = calloc(outputs.num_outputs + 1, sizeof *kinds);
  size_t* sizes = calloc(outputs.num_outputs + 1, sizeof *sizes);
  for (size_t i = 0; i < outputs.num_outputs; i++) {
    kinds[i] = "device";
    sizes[i] = strlen("device");
  }
  args->num_outputs = outputs.num_outputs;
  args->memory_kinds = kinds;
  args->memory_kind_sizes = sizes;
  return NULL;
}

static PJRT_Error* client_compile(PJRT_Client_Compile_Args* args) {
  const PJRT_Program* given = args->program;
  size_t size = 0;
  char* code = rewriter(given->code, given->code_size, &size);
  if (!code) {
    fprintf(stderr, "emulator: a program of %zu bytes could not be rewritten\n", given->code_size);
    abort();
  }
  PJRT_Program rewritten = *given;
  rewritten.code = code;
  rewritten.code_size = size;
  args->program = &rewritten;
  PJRT_Error* error = plugin->PJRT_Client_Compile(args);
  args->program = given;
  return error;
}

// torch_tpu lowers programs to the StableHLO version that the plugin names; a newer one is claimed, as the rewriter
// itself lowers what it has rewritten.
static PJRT_Error* plugin_attributes(PJRT_Plugin_Attributes_Args* args) {
  PJRT_Error* error = plugin->PJRT_Plugin_Attributes(args);
  if (error) return error;
  PJRT_NamedValue* values = calloc(args->num_attributes + 1, sizeof *values);
  for (size_t i = 0; i < args->num_attributes; i++) {
    values[i] = args->attributes[i];
    if (values[i].name_size == strlen("stablehlo_current_version") &&
        !memcmp(values[i].name, "stablehlo_current_version", values[i].name_size))
      values[i].int64_array_value = claimed_stablehlo;
  }
  args->attributes = values;
  return NULL;
}

// The record. Python reads the kinds by these numbers.
enum { TO_DEVICE, TO_HOST, ON_DEVICE, EXECUTION, NEW_RESULT, RESULT_IN_PLACE };
struct event { int64_t kind, bytes; };
#define MAX_EVENTS (1 << 18)
static struct event events[MAX_EVENTS];
static int64_t num_events;
static size_t large_bytes;

static void record(int64_t kind, int64_t bytes) {
  int64_t at = __atomic_fetch_add(&num_events, 1, __ATOMIC_SEQ_CST);
  if (at >= MAX_EVENTS) {
    fprintf(stderr, "emulator: more than %d events\n", MAX_EVENTS);
    abort();
  }
  events[at] = (struct event){kind, bytes};
}

// Start a new record. Results of at least so many bytes are recorded; 0 for none.
EXPORT void emulator_record(size_t large) {
  large_bytes = large;
  __atomic_store_n(&num_events, 0, __ATOMIC_SEQ_CST);
}

EXPORT const struct event* emulator_events(int64_t* count) {
  *count = __atomic_load_n(&num_events, __ATOMIC_SEQ_CST);
  return events;
}

static void must(PJRT_Error* error, const char* what) {
  if (!error) return;
  PJRT_Error_Message_Args message = {.struct_size = sizeof message, .error = error};
  plugin->PJRT_Error_Message(&message);
  fprintf(stderr, "emulator: %s: %.*s\n", what, (int)message.message_size, message.message);
  abort();
}

static size_t size_of(PJRT_Buffer* buffer) {
  PJRT_Buffer_OnDeviceSizeInBytes_Args args = {.struct_size = sizeof args, .buffer = buffer};
  must(plugin->PJRT_Buffer_OnDeviceSizeInBytes(&args), "size of a buffer");
  return args.on_device_size_in_bytes;
}

static uintptr_t address_of(PJRT_Buffer* buffer) {
  PJRT_Buffer_UnsafePointer_Args args = {.struct_size = sizeof args, .buffer = buffer};
  must(plugin->PJRT_Buffer_UnsafePointer(&args), "address of a buffer");
  return args.buffer_pointer;
}

static PJRT_Error* from_host(PJRT_Client_BufferFromHostBuffer_Args* args) {
  PJRT_Error* error = plugin->PJRT_Client_BufferFromHostBuffer(args);
  if (!error) record(TO_DEVICE, size_of(args->buffer));
  return error;
}

static PJRT_Error* transfer_data(PJRT_AsyncHostToDeviceTransferManager_TransferData_Args* args) {
  record(TO_DEVICE, args->transfer_size);
  return plugin->PJRT_AsyncHostToDeviceTransferManager_TransferData(args);
}

static PJRT_Error* to_host(PJRT_Buffer_ToHostBuffer_Args* args) {
  if (args->dst) record(TO_HOST, size_of(args->src));  // otherwise it asks for the size
  return plugin->PJRT_Buffer_ToHostBuffer(args);
}

static PJRT_Error* raw_to_host(PJRT_Buffer_CopyRawToHost_Args* args) {
  record(TO_HOST, args->transfer_size);
  return plugin->PJRT_Buffer_CopyRawToHost(args);
}

static PJRT_Error* to_device(PJRT_Buffer_CopyToDevice_Args* args) {
  record(ON_DEVICE, size_of(args->buffer));
  return plugin->PJRT_Buffer_CopyToDevice(args);
}

static PJRT_Error* to_memory(PJRT_Buffer_CopyToMemory_Args* args) {
  record(ON_DEVICE, size_of(args->buffer));
  return plugin->PJRT_Buffer_CopyToMemory(args);
}

static PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  record(EXECUTION, 0);
  size_t limit = large_bytes;
  if (!limit) return plugin->PJRT_LoadedExecutable_Execute(args);
  uintptr_t* given = calloc(args->num_args + 1, sizeof *given);
  size_t num_given = 0;
  for (size_t i = 0; i < args->num_args; i++)
    if (size_of(args->argument_lists[0][i]) >= limit) given[num_given++] = address_of(args->argument_lists[0][i]);
  PJRT_LoadedExecutable_GetExecutable_Args get = {.struct_size = sizeof get, .loaded_executable = args->executable};
  must(plugin->PJRT_LoadedExecutable_GetExecutable(&get), "executable");
  PJRT_Executable_NumOutputs_Args outputs = {.struct_size = sizeof outputs, .executable = get.executable};
  must(plugin->PJRT_Executable_NumOutputs(&outputs), "number of outputs");
  PJRT_Executable_Destroy_Args destroy = {.struct_size = sizeof destroy, .executable = get.executable};
  must(plugin->PJRT_Executable_Destroy(&destroy), "executable");
  PJRT_Error* error = plugin->PJRT_LoadedExecutable_Execute(args);
  for (size_t i = 0; !error && i < outputs.num_outputs; i++) {
    PJRT_Buffer* result = args->output_lists[0][i];
    size_t size = size_of(result);
    if (size < limit) continue;
    uintptr_t address = address_of(result);
    int64_t kind = NEW_RESULT;
    for (size_t j = 0; j < num_given; j++)
      if (given[j] == address) kind = RESULT_IN_PLACE;
    record(kind, size);
  }
  free(given);
  return error;
}

// The TPU topology extension: its functions take a struct that begins with its size and the topology.
#define TPU_TOPOLOGY_EXTENSION ((PJRT_Extension_Type)16)
#define NUM_SLOTS 32
struct count_args { size_t struct_size; const void* topology; int32_t count; };
struct flag_args { size_t struct_size; const void* topology; bool flag; };
struct bounds_args { size_t struct_size; const void* topology; size_t capacity; int32_t* bounds; size_t num_bounds; };

static PJRT_Error* answer_one(struct count_args* args) { args->count = 1; return NULL; }
static PJRT_Error* answer_false(struct flag_args* args) { args->flag = false; return NULL; }
static PJRT_Error* answer_unit_bounds(struct bounds_args* args) {
  for (int i = 0; i < 3; i++) args->bounds[i] = 1;
  args->num_bounds = 3;
  return NULL;
}
static PJRT_Error* answer_nothing(void* args) {
  (void)args;
  fprintf(stderr, "emulator: torch_tpu called a function of the TPU topology that is not emulated\n");
  abort();
}

static struct { PJRT_Extension_Base base; void* functions[NUM_SLOTS]; } topology;

static void fill_topology(PJRT_Extension_Base* next) {
  topology.base = (PJRT_Extension_Base){.struct_size = sizeof topology, .type = TPU_TOPOLOGY_EXTENSION, .next = next};
  for (int i = 0; i < NUM_SLOTS; i++) topology.functions[i] = (void*)answer_nothing;
  topology.functions[1] = (void*)answer_false;                                // is it a part of a slice
  for (int i = 7; i <= 15; i++) topology.functions[i] = (void*)answer_one;    // chips, cores, processes
  for (int i = 24; i <= 26; i++) topology.functions[i] = (void*)answer_unit_bounds;
}

EXPORT const PJRT_Api* GetPjrtApi(void) {
  static PJRT_Api* api;
  if (api) return api;
  if (!plugin) {
    fprintf(stderr, "emulator: not configured\n");
    return NULL;
  }
  api = calloc(1, plugin->struct_size);
  memcpy(api, plugin, plugin->struct_size);
  api->PJRT_Client_Create = client_create;
  api->PJRT_Client_Compile = client_compile;
  api->PJRT_Executable_OutputMemoryKinds = output_memory_kinds;
  api->PJRT_Plugin_Attributes = plugin_attributes;
  api->PJRT_Client_BufferFromHostBuffer = from_host;
  api->PJRT_AsyncHostToDeviceTransferManager_TransferData = transfer_data;
  api->PJRT_Buffer_ToHostBuffer = to_host;
  api->PJRT_Buffer_CopyRawToHost = raw_to_host;
  api->PJRT_Buffer_CopyToDevice = to_device;
  api->PJRT_Buffer_CopyToMemory = to_memory;
  api->PJRT_LoadedExecutable_Execute = execute;
  fill_topology(api->extension_start);
  api->extension_start = &topology.base;
  return api;
}
