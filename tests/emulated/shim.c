// A PJRT plugin for tests: torch_tpu loads it in place of libtpu, and it forwards to a PJRT plugin for the CPU.
//
// What it adds is what torch_tpu asks of a TPU and a CPU plugin does not have: the topology extension of a single chip,
// memory kinds of outputs, and a hook through which Python rewrites each program before it is compiled. Everything that
// is not understood aborts with a message, so that no test passes on an invented answer.
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
  fill_topology(api->extension_start);
  api->extension_start = &topology.base;
  return api;
}
