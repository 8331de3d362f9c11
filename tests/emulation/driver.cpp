// Calls the functions of a library of kernels for another process, on that process's memory: run under an emulator, it
// stands for a processor that this machine does not have.
//
//     driver LIBRARY
//
// Requests come by standard input, answers go to standard output; all numbers are words of 64 bits.
//   find length name               -> found address, 0 if there is none
//   call address n ints... m floats...  -> fetch..., changed..., done result
// Touching memory of the caller fetches the chunk that it is in:
//   fetch address                  <- a bit for each page that exists, then all pages
// and when the call returns, the bytes that it changed are sent back:
//   changed address length bytes
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace {

enum Request : uint64_t { kFind = 1, kCall = 2 };
enum Answer : uint64_t { kFound = 1, kFetch = 2, kChanged = 3, kDone = 4 };

// Where memory of the caller is here (driver.py): what is below kSmall there is kLow higher, the rest kHigh lower.
constexpr uint64_t kSmall = 1ul << 44, kLow = 0x100000000000, kHigh = 0x300000000000, kEnd = 0x500000000000;
constexpr uint64_t kPage = 4096, kPages = 16, kChunk = kPage * kPages;
constexpr uint64_t kMerged = 8;  // equal bytes between two changes that are sent as one
constexpr int kInts = 40, kFloats = 8;

struct Chunk {
    std::string bytes;  // as they were fetched
    uint64_t pages;     // a bit for each that exists

    bool has(uint64_t offset) const { return pages >> offset / kPage & 1; }
};

std::mutex mutex;
std::map<uint64_t, Chunk> chunks;

uint64_t callers_address(uint64_t here) { return here < kLow + kSmall ? here - kLow : here + kHigh; }

void receive(void* to, uint64_t size) {
    for (char* at = static_cast<char*>(to); size > 0;) {
        const ssize_t got = read(0, at, size);
        if (got <= 0) _exit(0);  // the caller has ended
        at += got, size -= got;
    }
}

void send(const void* from, uint64_t size) {
    for (const char* at = static_cast<const char*>(from); size > 0;) {
        const ssize_t sent = write(1, at, size);
        if (sent <= 0) _exit(0);
        at += sent, size -= sent;
    }
}

uint64_t receive_word() {
    uint64_t word;
    receive(&word, sizeof word);
    return word;
}

void send_words(uint64_t kind, uint64_t word) {
    const uint64_t words[] = {kind, word};
    send(words, sizeof words);
}

Chunk fetch(uint64_t here) {
    Chunk chunk{std::string(kChunk, '\0'), 0};
    if (here < kLow || here >= kEnd) return chunk;
    send_words(kFetch, callers_address(here));
    chunk.pages = receive_word();
    receive(chunk.bytes.data(), kChunk);
    return chunk;
}

void on_fault(int, siginfo_t* info, void*) {
    const auto at = reinterpret_cast<uint64_t>(info->si_addr);
    const uint64_t first = at / kChunk * kChunk;
    const std::lock_guard lock(mutex);
    const bool known = chunks.count(first) > 0;
    const Chunk& chunk = known ? chunks[first] : chunks.emplace(first, fetch(first)).first->second;
    if (!chunk.has(at - first)) {
        std::fprintf(stderr, "driver: a kernel touched %lx, which is no memory of the caller\n", callers_address(at));
        _exit(3);
    }
    if (known) return;  // another thread fetched it meanwhile
    for (uint64_t offset = 0; offset < kChunk; offset += kPage) {
        if (!chunk.has(offset)) continue;
        // Moved there with its content: other threads must not see it empty.
        void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        std::memcpy(page, chunk.bytes.data() + offset, kPage);
        mremap(page, kPage, kPage, MREMAP_MAYMOVE | MREMAP_FIXED, reinterpret_cast<void*>(first + offset));
    }
}

// Sends what a page has other than `before`.
void send_changes(uint64_t here, const char* before) {
    const char* now = reinterpret_cast<const char*>(here);
    for (uint64_t begin = 0; begin < kPage; ++begin) {
        if (now[begin] == before[begin]) continue;
        uint64_t end = begin + 1;
        for (uint64_t i = end; i < kPage && i < end + kMerged; ++i) {
            if (now[i] != before[i]) end = i + 1;
        }
        send_words(kChanged, callers_address(here + begin));
        const uint64_t length = end - begin;
        send(&length, sizeof length);
        send(now + begin, length);
        begin = end;
    }
}

void return_chunks() {
    for (const auto& [first, chunk] : chunks) {
        for (uint64_t offset = 0; offset < kChunk; offset += kPage) {
            if (!chunk.has(offset)) continue;
            if (std::memcmp(reinterpret_cast<void*>(first + offset), chunk.bytes.data() + offset, kPage) != 0) {
                send_changes(first + offset, chunk.bytes.data() + offset);
            }
            munmap(reinterpret_cast<void*>(first + offset), kPage);
        }
    }
    chunks.clear();
}

// Whatever a function takes: of the AAPCS64, integers are in eight registers and then on the stack, a word each, and up to
// eight floats in registers of their own; what is given beyond a function's parameters it does not see.
template <int... I, int... F>
long call(uint64_t address, const long* i, const float* f, std::integer_sequence<int, I...>,
          std::integer_sequence<int, F...>) {
    const auto function = reinterpret_cast<long (*)(decltype(0L + I)..., decltype(0.0f + F)...)>(address);
    return function(i[I]..., f[F]...);
}

void serve_call() {
    const uint64_t address = receive_word();
    long ints[kInts] = {};
    float floats[kFloats] = {};
    receive(ints, receive_word() * sizeof *ints);
    receive(floats, receive_word() * sizeof *floats);
    const long result = call(address, ints, floats, std::make_integer_sequence<int, kInts>{},
                             std::make_integer_sequence<int, kFloats>{});
    return_chunks();
    send_words(kDone, result);
}

void serve_find(void* library) {
    std::string name(receive_word(), '\0');
    receive(name.data(), name.size());
    send_words(kFound, reinterpret_cast<uint64_t>(dlsym(library, name.c_str())));
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (library == nullptr) {
        std::fprintf(stderr, "driver: %s\n", dlerror());
        return 2;
    }
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    for (;;) {
        const uint64_t request = receive_word();
        if (request == kFind) {
            serve_find(library);
        } else if (request == kCall) {
            serve_call();
        }
    }
}
