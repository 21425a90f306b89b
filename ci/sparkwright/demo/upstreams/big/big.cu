// Stands for the external projects' libraries, which the graft takes from the official wheel as they are.
namespace big {

__global__ void scale(float* values, float factor, int count) {
  int const index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < count) {
    values[index] *= factor;
  }
}

}  // namespace big

extern "C" int big_scale(float* values, float factor, int count) {
  big::scale<<<(count + 255) / 256, 256>>>(values, factor, count);
  return cudaGetLastError();
}
